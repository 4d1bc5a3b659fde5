"""``python -m benchmarks overhead``: see the module. What searches gain is `imgscale bench`'s to measure."""

from __future__ import annotations

import argparse

from benchmarks import overhead


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "overhead",
        help=(overhead.__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    overhead.add_arguments(command)
    overhead.main(parser.parse_args())


if __name__ == "__main__":
    main()
