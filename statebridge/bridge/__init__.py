"""Model pairs, the fit of a bridge, the Bridge itself and the hand-over."""

from statebridge.bridge.artefact import BridgeConfig
from statebridge.bridge.bridge import Bridge
from statebridge.bridge.calibrate import fit_calibrator
from statebridge.bridge.config import PLANS, CalibrateConfig, DocumentsConfig, FitConfig
from statebridge.bridge.documents import Document, TokenWindow, load_documents, token_windows
from statebridge.bridge.fit import fit_bridge
from statebridge.bridge.handoff import Reply, handoff
from statebridge.bridge.pair import ModelPair, tokenizer_digest

__all__ = [
    "PLANS",
    "Bridge",
    "BridgeConfig",
    "CalibrateConfig",
    "Document",
    "DocumentsConfig",
    "FitConfig",
    "ModelPair",
    "Reply",
    "TokenWindow",
    "fit_bridge",
    "fit_calibrator",
    "handoff",
    "load_documents",
    "token_windows",
    "tokenizer_digest",
]
