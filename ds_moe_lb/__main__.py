"""`python -m ds_moe_lb`: the same as the console script `ds-moe-lb`."""

import sys

from ds_moe_lb.cli import main

if __name__ == "__main__":
    sys.exit(main())
