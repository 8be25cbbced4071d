"""Old import path of training helpers; the code lives in utils.train, utils.runtime and models."""

from models.reparam import fuse_conv_bn as fuse_conv_and_bn
from utils.runtime import init_seeds, select_device
from utils.train.ema import ModelEMA
from utils.train.optim import smart_optimizer
from utils.train.stopping import EarlyStopping

__all__ = ["EarlyStopping", "ModelEMA", "fuse_conv_and_bn", "init_seeds", "select_device", "smart_optimizer"]
