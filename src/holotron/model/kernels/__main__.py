"""Build the CPU kernels, or say why they cannot be built: all else works without them, slower."""

from __future__ import annotations

import argparse
import sys
import time

from holotron.model import kernels


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m holotron.model.kernels", description=__doc__)
    parser.add_argument("--again", action="store_true", help="build even if the library is there")
    options = parser.parse_args()
    start = time.perf_counter()
    there = kernels.library().is_file() and not options.again
    try:
        path = kernels.build(again=options.again)
    except kernels.BuildError as error:
        print(f"CPU kernels: not built. {error}", file=sys.stderr)
        return 1
    print(f"CPU kernels: {path} ({'was there' if there else f'built in {time.perf_counter() - start:.0f} s'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
