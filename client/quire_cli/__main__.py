"""`python -m quire_cli` is `quire`."""

import sys

from quire_cli import main

sys.exit(main())
