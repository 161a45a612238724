"""``python -m ronde``."""

import sys

from ronde.cli import main

sys.exit(main())
