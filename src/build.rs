//! Link arguments of the extension module.

use std::ffi::OsStr;

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    // site-packages/oxidion/_oxidion.abi3.so finds site-packages/torch/lib by itself, without LD_LIBRARY_PATH.
    let origin = match std::env::var_os("CARGO_CFG_TARGET_OS").as_deref().and_then(OsStr::to_str) {
        Some("linux") => "$ORIGIN",
        Some("macos") => "@loader_path",
        _ => return,
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,{origin}/../torch/lib");
}
