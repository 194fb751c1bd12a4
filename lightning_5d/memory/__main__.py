"""`python -m lightning_5d.memory FOLDER [TITLE]` draws the charts of a recording anew; with ``--beside``, of several runs one picture."""

import argparse
from pathlib import Path

from lightning_5d.memory.beside import draw_beside
from lightning_5d.memory.charts import draw_folder


def main() -> None:
    """Draw what the command line says, and print what was written."""
    parser = argparse.ArgumentParser(prog="python -m lightning_5d.memory", description="Charts of recorded memory.")
    parser.add_argument("folder", type=Path, help="where a MemoryProfiler wrote its files")
    parser.add_argument("title", nargs="?", default="Memory")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        metavar="OTHER",
        help="draw that folder's run to the right of this one's, on one scale, as OTHER/memory_beside.png",
    )
    arguments = parser.parse_args()
    try:
        if arguments.beside:
            folders = [arguments.folder, *arguments.beside]
            files = [draw_beside(folders, folders[-1] / "memory_beside.png", arguments.title)]
        else:
            files = draw_folder(arguments.folder, arguments.title)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for path in files:
        print(path)


if __name__ == "__main__":
    main()
