// Elementwise passes over operands that may be codes or rounded at random.
#include "coded.cuh"
#include "lamb.cuh"

UPDATE_CODED(momentum, Momentum)
UPDATE_CODED(momentum_alone, MomentumAlone)
UPDATE_CODED(accumulate, Accumulate)
UPDATE_CODED(apply, Apply)
UPDATE_CODED(apply_late, ApplyLate)
UPDATE_CODED(convert, Convert)
UPDATE_CODED(release, Release)
UPDATE_CODED(decay, Decay)
UPDATE_CODED(adamw, AdamW)
UPDATE_CODED(adamw_largest, AdamWLargest)
UPDATE_CODED(lion, Lion)
UPDATE_CODED(direction, Direction)
UPDATE_CODED(lamb, Lamb)
UPDATE_CODED(lamb_along, LambAlong)
