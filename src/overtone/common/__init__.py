"""What tasks, runs, reports and commands share: limits of numbers, errors of the machine."""
