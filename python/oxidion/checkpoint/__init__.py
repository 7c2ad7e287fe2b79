"""Checkpoints: state dicts and folders of other packages' optimizers; files and folders that are whole."""

from oxidion.checkpoint.folders import load_dcp, save_dcp
from oxidion.checkpoint.sources import SOURCES, Source, import_state_dict
from oxidion.checkpoint.whole import async_save, latest_folder, whole_file, whole_folder

__all__ = [
    "SOURCES",
    "Source",
    "async_save",
    "import_state_dict",
    "latest_folder",
    "load_dcp",
    "save_dcp",
    "whole_file",
    "whole_folder",
]
