"""Searches for a configuration of a run that fits into the memory of its IPUs and runs fast.

run                  the class ``Run``: all values that determine a run's memory and clock cycles
batch                the search for the largest micro-batch
places               the places where a stage may begin, and the tensors that cross a place
division_costs       the time and the memory of a model's divisions into stages
slowest_stage        the division whose slowest stage is as fast as possible
splits               the search for the fastest division of a model into stages
checkpoint_sets      sets of recomputation checkpoints, with their memory and time
recomputation        the search for the fastest recomputation that fits
fewest_ipus          the search for the fewest IPUs on which a model fits
search_answers       the results of the searches for printing and as JSON

A search changes the configuration of a run in many ways, and estimates the memory and time of each
changed configuration. No module of this package estimates a configuration itself: the modules
``memory`` and ``cycles`` of the package ``ipu`` do. May call: ipu, documents, errors.
"""

from popdist_py.ipu.searches.batch import largest_batch
from popdist_py.ipu.searches.checkpoint_sets import RecomputationPoint, recomputation_curve
from popdist_py.ipu.searches.fewest_ipus import Combination, fewest_ipus
from popdist_py.ipu.searches.places import places_to_cut, with_checkpoints
from popdist_py.ipu.searches.recomputation import cheapest_recomputation
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.searches.slowest_stage import least_slowest
from popdist_py.ipu.searches.splits import best_splits

__all__ = [
    "Combination",
    "RecomputationPoint",
    "Run",
    "best_splits",
    "cheapest_recomputation",
    "fewest_ipus",
    "largest_batch",
    "least_slowest",
    "places_to_cut",
    "recomputation_curve",
    "with_checkpoints",
]
