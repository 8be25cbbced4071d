"""Everything but the network: leaves (boxes, files, log, runtime) and the data, train, evaluate, deploy parts."""
