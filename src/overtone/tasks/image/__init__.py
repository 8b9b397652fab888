"""Image classification: data sets, augmentation, models."""
