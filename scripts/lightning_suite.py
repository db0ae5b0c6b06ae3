"""Run Lightning's own tests with what a training adds: lightning_suite.py [folder] [test …] [key=value …]

folder    a checkout of Lightning at the tag of the installed version; without one, it is cloned from GitHub
test      files or folders below tests/tests_pytorch, such as loops or trainer/test_trainer.py; without any, all groups

Each test runs with each Trainer as a training makes it; those that fail run plain, too, and if they pass then, without
the checkpoints, loggers, rates and bar of the default configuration. Tests that pass plain only, and are not in
scripts/lightning_tests/differences.yaml with a reason, are printed, and the status is 1. They import jsonargparse.

workers=2 processes, tag=2.6.5 of the clone, results=runs/lightning for the outcomes and logs, record=true to print what
is missing in the list, select="not spawn and not fork" as pytest's -k, timeout=120 seconds for a test.
"""

import sys

from lightning_tests.suite import main

if __name__ == "__main__":
    sys.exit(main(__doc__, sys.argv[1:]))
