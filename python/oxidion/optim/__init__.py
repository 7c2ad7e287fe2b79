"""The optimizer classes: signatures, defaults, documentation."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch.optim import Optimizer

from oxidion.optim.adafactor import Adafactor
from oxidion.optim.adamw import AdamW
from oxidion.optim.ademamix import AdEMAMix
from oxidion.optim.apollo import APOLLOAdamW
from oxidion.optim.apollo_mini import APOLLOMini
from oxidion.optim.came import CAME
from oxidion.optim.dion import Dion
from oxidion.optim.dion2 import Dion2
from oxidion.optim.galore import GaLoreAdamW
from oxidion.optim.lamb import Lamb
from oxidion.optim.lion import Lion
from oxidion.optim.mixed_precision import DionMixedPrecisionConfig
from oxidion.optim.muon import Muon
from oxidion.optim.muon_h import MuonH
from oxidion.optim.nordion2 import NorDion2
from oxidion.optim.normuon import NorMuon
from oxidion.optim.soap import SOAP
from oxidion.optim.soap_muon import SOAPMuon

Dion3 = NorDion2

AlgorithmName: TypeAlias = Literal[
    "adafactor",
    "adamw",
    "ademamix",
    "apollo_adamw",
    "came",
    "dion",
    "dion2",
    "galore_adamw",
    "lamb",
    "lion",
    "muon",
    "nordion2",
    "normuon",
    "soap",
    "soap_muon",
]
"""Names of algorithms, as groups keep them."""

Algorithm: TypeAlias = AlgorithmName | type[Optimizer]
"""An algorithm by its name or by its class."""

__all__ = [
    "CAME",
    "SOAP",
    "APOLLOAdamW",
    "APOLLOMini",
    "AdEMAMix",
    "Adafactor",
    "AdamW",
    "Dion",
    "Dion2",
    "Dion3",
    "DionMixedPrecisionConfig",
    "GaLoreAdamW",
    "Lamb",
    "Lion",
    "Muon",
    "MuonH",
    "NorDion2",
    "NorMuon",
    "SOAPMuon",
]
