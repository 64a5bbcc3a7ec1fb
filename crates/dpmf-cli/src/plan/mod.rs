//! `dpmf plan`.

mod server;
