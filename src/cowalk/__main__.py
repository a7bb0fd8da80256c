"""`python -m cowalk` is `cowalk`."""

import sys

from cowalk.cli import main

sys.exit(main())
