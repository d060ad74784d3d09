//! One spelling of PCI addresses: the kernel's.

/// `bus_id` as the kernel spells it: `0000:00:07.0`.
///
/// NVML gives the domain eight digits and writes in upper case, `/proc` four and in
/// lower case; a domain beyond four digits (Intel's VMD) keeps as many as it needs.
/// What is no PCI address comes back in lower case.
pub fn normalise(bus_id: &str) -> String {
    let bus_id = bus_id.trim().to_ascii_lowercase();
    match bus_id.split_once(':') {
        Some((domain, rest)) if rest.contains(':') => match u32::from_str_radix(domain, 16) {
            Ok(domain) => format!("{domain:04x}:{rest}"),
            Err(_) => bus_id,
        },
        _ => bus_id,
    }
}

#[cfg(test)]
mod tests {
    use super::normalise;

    #[test]
    fn nvml_and_the_kernel_come_to_one_spelling() {
        for (from, to) in [
            ("00000000:00:07.0", "0000:00:07.0"),
            ("00000000:AF:00.0", "0000:af:00.0"),
            ("0000:af:00.0", "0000:af:00.0"),
            ("00010000:01:00.0", "10000:01:00.0"),
            ("AF:00.0", "af:00.0"),
            ("", ""),
            ("+1:x:y", "0001:x:y"),
        ] {
            assert_eq!(normalise(from), to);
        }
    }
}
