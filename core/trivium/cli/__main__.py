"""python -m trivium.cli"""

from __future__ import annotations

import sys

from trivium.cli.main import main

sys.exit(main())
