"""The optimizer classes: signatures, defaults, documentation."""

from __future__ import annotations

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
