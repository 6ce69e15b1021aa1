"""Turn a checkpoint of one format into one of another: ``python tools/convert.py SRC DST --to zarr``."""

import sys

from megackpt.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
