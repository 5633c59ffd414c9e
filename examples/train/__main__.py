"""`python -m examples.train` trains a workload."""

import sys

from examples.train.command import main

sys.exit(main())
