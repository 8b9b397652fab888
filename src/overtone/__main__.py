"""`python -m overtone`, as torchrun starts it."""

from overtone.cli import main

if __name__ == "__main__":
    main()
