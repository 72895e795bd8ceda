"""Networks and data: ``table`` has the tasks of trainings, the other files those of studies."""
