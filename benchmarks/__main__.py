"""``python -m benchmarks NAME``: see the modules. What searches gain is `imgscale bench`'s to measure."""

from __future__ import annotations

import argparse

from benchmarks import (
    bandit,
    bandit_lessons,
    bandit_live,
    bandit_settings,
    bandit_table,
    batch,
    diversity,
    early_exit,
    kill,
    overhead,
    previews,
    shares,
    verifiers,
)

MODULES = (
    bandit,
    bandit_lessons,
    bandit_live,
    bandit_settings,
    bandit_table,
    batch,
    diversity,
    early_exit,
    kill,
    overhead,
    previews,
    shares,
    verifiers,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for module in MODULES:
        command = commands.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            help=(module.__doc__ or "").partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    args = parser.parse_args()
    args.main(args)


if __name__ == "__main__":
    main()
