"""Modules in less memory: those of `torch.nn` with the same arguments, parameters and `state_dict` keys, and additive
attention, which `torch.nn` does not have."""

from encore.rnn.attention import AdditiveAttention
from encore.rnn.modules import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = ["GRU", "LSTM", "RNN", "AdditiveAttention", "GRUCell", "LSTMCell", "RNNCell"]
