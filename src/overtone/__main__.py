"""`python -m overtone`: the command line, in the form in which torchrun starts it."""

from overtone.cli import main

if __name__ == "__main__":
    main()
