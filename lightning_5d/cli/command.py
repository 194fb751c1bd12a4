"""Which sub-command was asked for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_5d.cli.plan import add_plan_options
from lightning_5d.cli.schedule import add_schedule_options

HYDRA_COMMANDS = {
    "train": "train a model; Hydra options and overrides, see `fived train --help`",
    "verify": "compare a configured run with the same run in one process; takes what `fived train` takes",
}


def main() -> int:
    """Run the `fived` command of `sys.argv` and return its exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else None
    if command in HYDRA_COMMANDS:
        from lightning_5d.cli.configured import run_configured

        return run_configured(command)
    arguments, rest = _parser().parse_known_args()
    if arguments.command == "worker":
        # Lightning appends Hydra overrides when it starts a worker; they are already in the worker's file.
        from lightning_5d.cli.job import run_worker

        run_worker(arguments.config, arguments.cwd)
        return 0
    if rest:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "schedule":
        from lightning_5d.cli.schedule import run_schedule

        return run_schedule(arguments)
    if arguments.command == "plan":
        from lightning_5d.cli.plan import run_plan

        return run_plan(arguments)
    return _tokenize(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fived", description="Five-dimensional parallel training for PyTorch Lightning."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, description in HYDRA_COMMANDS.items():
        commands.add_parser(name, help=description, add_help=False)
    tokenize = commands.add_parser("tokenize", help="turn text into a file of token ids for `data=tokens`")
    tokenize.add_argument("input", type=Path, help="a UTF-8 text file, or a folder of them")
    tokenize.add_argument("output", type=Path, help="the .bin file; OUTPUT.json beside it describes it")
    tokenize.add_argument(
        "--tokenizer", default="byte", help="'byte' (default), or the folder of a Hugging Face tokenizer"
    )
    tokenize.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    add_schedule_options(commands.add_parser("schedule", help="draw pipeline schedules, with their bubble and memory"))
    add_plan_options(
        commands.add_parser(
            "plan", help="show what a tensor, context or expert axis makes of a model and its sequences"
        )
    )
    # Not for people: how the other ranks of a run that Hydra configured are started.
    worker = commands.add_parser("worker")
    worker.add_argument("config", type=Path)
    worker.add_argument("--cwd", type=Path, required=True)
    return parser


def _tokenize(arguments: argparse.Namespace) -> int:
    from lightning_5d.data.tokenizer import tokenize_files

    try:
        sidecar = tokenize_files(arguments.input, arguments.output, arguments.tokenizer, overwrite=arguments.force)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.output}: {sidecar.count} tokens of {sidecar.dtype}, vocab_size {sidecar.vocab_size}")
    print(
        f"Train on it: fived train data=tokens data.path={arguments.output} model.decoder.vocab_size={sidecar.vocab_size}"
    )
    return 0
