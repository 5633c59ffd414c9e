"""Drop-in modules: the same arguments, parameters and `state_dict` keys as in `torch.nn`, in less memory."""

from encore.rnn.modules import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]
