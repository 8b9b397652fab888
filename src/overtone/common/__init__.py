"""What every room of the workshop uses: limits of numbers, errors of the machine."""
