"""`python -m quire_client.cli` is `quire`."""

import sys

from quire_client.cli import main

sys.exit(main())
