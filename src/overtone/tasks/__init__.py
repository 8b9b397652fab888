"""Tasks: a model, data, and a measure of how well the model does. docs/tasks.md describes them for users.

``task.py`` says what a task is and ``options.py`` which options there are; ``loading.py`` finds a task by its name.
``text/`` and ``image/`` are the built-in tasks "language" and "image".
"""

from overtone.errors import TaskError
from overtone.tasks.loading import load_task, refuse_missing, refuse_untrusted
from overtone.tasks.options import Image, Language, TaskOptions
from overtone.tasks.sharding import Feed, Sampler, Samples, ShardedFeed
from overtone.tasks.task import Task, Tensors

__all__ = [
    "Feed", "Image", "Language", "Sampler", "Samples", "ShardedFeed", "Task", "TaskError", "TaskOptions", "Tensors",
    "load_task", "refuse_missing", "refuse_untrusted",
]  # fmt: skip
