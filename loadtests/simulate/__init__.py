"""The real scheduler under traffic that takes no time: a clock that a cost model of steps moves."""
