//! Any bytes are a mechanism or an error, never a panic: `cargo fuzz run mechanism_file`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(mechanism) = dpmf::format::from_bytes(bytes) {
        // What was accepted can be written and read again.
        let again = dpmf::format::to_bytes(&mechanism).expect("an accepted mechanism can be written");
        dpmf::format::from_bytes(&again).expect("a written mechanism can be read");
    }
});
