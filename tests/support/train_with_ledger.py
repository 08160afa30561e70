"""Run src/train.py with a ledger; the command line is the same.

accelerate launch ... tests/support/train_with_ledger.py RECIPE key=value ...
"""

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

if __name__ == "__main__":
    import gearbox.launch.lifeline  # noqa: F401  isort: skip  first, as in src/train.py
    from gearbox.launch import cli

    spec = importlib.util.spec_from_file_location("real_train", TESTS.parent / "src" / "train.py")
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)

    def main(arguments):
        from support import ledger

        ledger.install()
        return real.main(arguments)

    cli.run(main)
