//! cross_convert
