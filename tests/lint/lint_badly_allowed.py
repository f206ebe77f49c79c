"""Comments that allow nothing, in a file of their own: a malformed comment is a finding wherever it stands."""


def badly_allowed(x):
    a = x.sum().item()  # graphsafe: allow GS101
    b = x.sum().item()  # graphsafe: allow GS999 no such rule
    c = x.sum().item()  # graphsafe: allow GS102 another rule
    return x * a * b * c
