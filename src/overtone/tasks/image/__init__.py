"""The task "image": labelled images, augmentation, and classifiers of the transformers library.

Images go this way: ``arrays.py`` or ``files.py`` reads a `Source` (``source.py``), ``dataset.py`` splits it,
``augment.py`` makes samples of it, ``task.py`` trains a ResNet or another classifier on the samples.

Importing this package makes exported models with the small stem known to transformers, so that they load without
``trust_remote_code=True``.
"""

from overtone.tasks.image.small_resnet import SmallResNetConfig, SmallResNetForImageClassification
from overtone.tasks.image.task import PRESETS, ImageTask

__all__ = ["PRESETS", "ImageTask", "SmallResNetConfig", "SmallResNetForImageClassification"]
