"""The kernel set: operators of linear attention that keep the graph contract, their references and layers."""
