"""Horovod's callbacks for Keras 3."""

from ronde.keras.callback_classes import callback_classes
from ronde.session.frameworks import import_framework

_classes = callback_classes(import_framework("keras"))
BestModelCheckpoint = _classes.BestModelCheckpoint
BroadcastGlobalVariablesCallback = _classes.BroadcastGlobalVariablesCallback
LearningRateScheduleCallback = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback = _classes.LearningRateWarmupCallback
MetricAverageCallback = _classes.MetricAverageCallback
