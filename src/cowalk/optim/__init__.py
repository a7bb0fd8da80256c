"""Rules that update models of any framework, by one walk over the state, the model and its gradients.

What lives here: rules, states, updates, flat vectors of parameters. What may not: how gradients come about (`cowalk.gradients`).
"""

from cowalk.optim.adjusting import adjust, freeze, thaw
from cowalk.optim.arrays import functions
from cowalk.optim.destructure import DestructureError, destructure
from cowalk.optim.rules.adam import AdaBelief, Adam, AdaMax, AdamW, AMSGrad, NAdam, OAdam, RAdam
from cowalk.optim.rules.adaptive import AdaDelta, AdaGrad, RMSProp
from cowalk.optim.rules.composing import AccumGrad, Chain, MixedPrecision
from cowalk.optim.rules.descent import Descent, Lion, Momentum, Nesterov, Rprop
from cowalk.optim.rules.modifiers import ClipGrad, ClipNorm, SignDecay, WeightDecay
from cowalk.optim.rules.muon import Muon
from cowalk.optim.rules.rule import Rule, RuleError
from cowalk.optim.state import LeafState, OptimizerState, setup
from cowalk.optim.updating import UpdateError, update, update_

__all__ = [
    "AMSGrad",
    "AccumGrad",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adam",
    "AdamW",
    "Chain",
    "ClipGrad",
    "ClipNorm",
    "Descent",
    "DestructureError",
    "LeafState",
    "Lion",
    "MixedPrecision",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "OAdam",
    "OptimizerState",
    "RAdam",
    "RMSProp",
    "Rprop",
    "Rule",
    "RuleError",
    "SignDecay",
    "UpdateError",
    "WeightDecay",
    "adjust",
    "destructure",
    "freeze",
    "functions",
    "setup",
    "thaw",
    "update",
    "update_",
]
