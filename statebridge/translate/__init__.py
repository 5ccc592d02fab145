"""Fitted maps of state components, source to receiver, and the estimators that fit them.

| component | map | estimator | fitted from |
|---|---|---|---|
| K (keys and values) | HeadAffine | KeyValueRidge | Moments of head_rows |
| R (recurrent matrices) | HeadBilinear | BilinearRidge | blocks of paired states |
| C (convolution history) | BlockAffine | BlockRidge | BlockMoments |

This room knows tensors; models, layers and files are elsewhere.
"""

from statebridge.translate.base import Translator
from statebridge.translate.bilinear import BilinearRidge, HeadBilinear
from statebridge.translate.blocks import Blocks
from statebridge.translate.grouped import BlockAffine, BlockLayout, BlockMoments, BlockRidge
from statebridge.translate.keyvalue import HeadAffine, KeyValueRidge, head_moments, head_rows
from statebridge.translate.moments import Moments
from statebridge.translate.ridge import AffineRidge

__all__ = [
    "AffineRidge",
    "BilinearRidge",
    "BlockAffine",
    "BlockLayout",
    "BlockMoments",
    "BlockRidge",
    "Blocks",
    "HeadAffine",
    "HeadBilinear",
    "KeyValueRidge",
    "Moments",
    "Translator",
    "head_moments",
    "head_rows",
]
