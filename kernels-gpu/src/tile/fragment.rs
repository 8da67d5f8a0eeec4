//! fragment
