"""The recurrence and its adjoint, formula by formula, without autograd: what the recurrent reference is compared with.

Given gates only; one sequence and one value head at a time.
"""

from __future__ import annotations

import torch
from delta_rule_cases import Case, make, output_gradients


def _one(q, k, v, g, beta, state, scale, do, dstate):
    """One sequence of one value head: q, k [T, K]; v, do [T, V]; g [T, 1 or K]; beta [T]; states [K, V]."""
    tokens = q.shape[0]
    states, decayed, errors, outputs = [state], [], [], []
    for t in range(tokens):
        decayed.append(g[t].exp()[:, None] * states[-1])
        errors.append(v[t] - decayed[-1].T @ k[t])
        states.append(decayed[-1] + beta[t] * torch.outer(k[t], errors[-1]))
        outputs.append(scale * states[-1].T @ q[t])
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in (q, k, v, g, beta))
    for t in reversed(range(tokens)):
        dstate = dstate + scale * torch.outer(q[t], do[t])
        dq[t] = scale * states[t + 1] @ do[t]
        dbeta[t] = k[t] @ dstate @ errors[t]
        de = beta[t] * dstate.T @ k[t]
        dv[t] = de
        ddecayed = dstate - torch.outer(k[t], de)
        dk[t] = beta[t] * dstate @ errors[t] - decayed[t] @ de
        da = (ddecayed * states[t]).sum(1)
        dg[t] = g[t].exp() * (da.sum(0, keepdim=True) if g.shape[1] == 1 else da)
        dstate = g[t].exp()[:, None] * ddecayed
    o = torch.stack(outputs) if outputs else torch.zeros_like(v)
    return o, states[-1], dq, dk, dv, dg, dbeta, dstate


def explicit(case: Case) -> dict[str, torch.Tensor]:
    """A packed case's outputs and gradients, named as :func:`delta_rule_cases.run` names them."""
    tensors = make(case)
    do, dht = output_gradients(case)
    q, k, v, beta, state = (tensors[n] for n in ("q", "k", "v", "beta", "initial_state"))
    g = tensors["g"].reshape(*v.shape[:3], -1)
    out = {"o": torch.zeros_like(v), "final_state": torch.zeros_like(state)}
    out |= {f"d{n}": torch.zeros_like(t) for n, t in tensors.items()}
    dg = torch.zeros_like(g)
    start = 0
    for n, length in enumerate(case.lengths):
        rows = slice(start, start + length)
        start += length
        for hv in range(v.shape[2]):
            h = hv // case.group
            o, final, dq, dk, dv, dgate, dbeta, dstate = _one(
                q[0, rows, h], k[0, rows, h], v[0, rows, hv], g[0, rows, hv], beta[0, rows, hv], state[n, hv],
                case.key**-0.5, do[0, rows, hv], dht[n, hv],
            )
            out["o"][0, rows, hv], out["final_state"][n, hv] = o, final
            out["dq"][0, rows, h] += dq
            out["dk"][0, rows, h] += dk
            out["dv"][0, rows, hv], dg[0, rows, hv], out["dbeta"][0, rows, hv] = dv, dgate, dbeta
            out["dinitial_state"][n, hv] = dstate
    out["dg"] = dg.view_as(tensors["g"])
    return out
