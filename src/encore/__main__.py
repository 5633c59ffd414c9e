"""`python -m encore` is the `encore` command."""

import sys

from encore.cli import main

sys.exit(main())
