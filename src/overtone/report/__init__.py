"""From run logs to tables and pages."""
