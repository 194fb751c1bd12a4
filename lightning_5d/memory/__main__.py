"""`python -m lightning_5d.memory FOLDER [TITLE]` draws the charts of a recording anew."""

import sys
from pathlib import Path

from lightning_5d.memory.charts import draw_folder

if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    for path in draw_folder(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "Memory"):
        print(path)
