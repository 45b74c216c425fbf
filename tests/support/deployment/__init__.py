"""The chart, deployment files and documents."""
