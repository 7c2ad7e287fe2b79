//! Link arguments of the extension module, and the machine code of CUDA kernels that is shipped with it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    list_machine_code();
    // site-packages/oxidion/_oxidion.abi3.so finds site-packages/torch/lib by itself, without LD_LIBRARY_PATH.
    let origin = match std::env::var_os("CARGO_CFG_TARGET_OS").as_deref().and_then(OsStr::to_str) {
        Some("linux") => "$ORIGIN",
        Some("macos") => "@loader_path",
        _ => return,
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,{origin}/../torch/lib");
}

/// Writes the list of the files `KEY.cubin` in the folder `OXIDION_CUBINS`, which `make wheel` fills; an empty one without.
fn list_machine_code() {
    println!("cargo:rerun-if-env-changed=OXIDION_CUBINS");
    let mut list = String::from("&[");
    if let Some(folder) = std::env::var_os("OXIDION_CUBINS") {
        println!("cargo:rerun-if-changed={}", folder.display());
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("OXIDION_CUBINS={}: {error}", folder.display()))
            .filter_map(|entry| entry.ok()?.path().canonicalize().ok())
            .filter(|file| file.extension() == Some(OsStr::new("cubin")))
            .collect();
        files.sort();
        for file in files {
            let key = file.file_stem().unwrap_or_default().display().to_string();
            let _ = write!(list, "({key:?}, include_bytes!({:?}) as &[u8]),", file.display().to_string());
        }
    }
    list.push(']');
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    if let Err(error) = std::fs::write(Path::new(&out).join("cubins.rs"), list) {
        panic!("the list of machine code: {error}");
    }
}
