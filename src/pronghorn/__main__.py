"""`python -m pronghorn` is the same as `pronghorn`."""

from pronghorn.cli import main

if __name__ == "__main__":
    main()
