"""`python -m rap`, the same as the installed command."""

from .cli import main

if __name__ == "__main__":
    main()
