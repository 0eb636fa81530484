"""`python -m barchan.cli`."""

import sys

from barchan.cli.main import main

sys.exit(main())
