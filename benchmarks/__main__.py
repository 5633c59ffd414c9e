"""`python -m benchmarks` runs a suite."""

import sys

from benchmarks.command import main

sys.exit(main())
