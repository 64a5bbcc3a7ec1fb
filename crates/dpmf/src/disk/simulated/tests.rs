use super::*;

/// What is left of a file that was begun with 600 bytes synced and goes on unsynced, over many seeds.
fn left(act: impl Fn(&Simulated, &mut crate::disk::File)) -> BTreeSet<Option<Vec<u8>>> {
    let run = |seed| {
        let disk = Simulated::new(seed);
        let place = disk.at("/file");
        let mut file = place.create_new(Access::Owner).unwrap();
        file.append(&[1; 600]).unwrap();
        file.sync().unwrap();
        place.sync_entry().unwrap();
        act(&disk, &mut file);
        disk.lose_power();
        assert!(file.append(&[9]).is_err(), "an open file does not outlive its process");
        place.read_if_any().unwrap()
    };
    (0..200).map(run).collect()
}

#[test]
fn synced_bytes_stay_and_others_come_in_sectors() {
    assert_eq!(left(|_, _| {}), BTreeSet::from([Some(vec![1; 600])]));
    let synced = left(|_, file| {
        file.append(&[2; 600]).unwrap();
        file.sync().unwrap();
    });
    assert_eq!(synced, BTreeSet::from([Some([[1; 600], [2; 600]].concat())]));
    let torn = left(|_, file| file.append(&[2; 600]).unwrap());
    // The length and the two sectors apart from one another.
    assert_eq!(torn.len(), 5);
    for bytes in torn.into_iter().map(Option::unwrap) {
        assert!(bytes[..600] == [1; 600] && [600, 1200].contains(&bytes.len()));
        assert!(bytes[600..].chunk_by(|a, b| a == b).map(<[u8]>::len).all(|n| [600, 424, 176].contains(&n)));
    }
}

#[test]
fn names_come_and_go_with_their_folder() {
    let both = BTreeSet::from([None, Some(vec![1; 600])]);
    assert_eq!(left(|disk, _| assert!(disk.at("/file").remove().unwrap())), both);
    let removed = left(|disk, _| {
        disk.at("/file").remove().unwrap();
        disk.at("/file").sync_entry().unwrap();
    });
    assert_eq!(removed, BTreeSet::from([None]));
    // A folder that is lost takes with it what was synced in it.
    for seed in 0..50 {
        let disk = Simulated::new(seed);
        disk.create_folder(Path::new("/a")).unwrap();
        disk.at("/a/b").replace(Access::Owner, |file| file.write_all(b"all")).unwrap();
        disk.lose_power();
        let (folder, file) = (disk.at("/a").exists().unwrap(), disk.at("/a/b").exists().unwrap());
        assert_eq!(folder, file);
    }
    let disk = Simulated::new(1);
    disk.at("/a/b/c").create_folders().unwrap();
    disk.lose_power();
    assert!(disk.at("/a/b/c").exists().unwrap());
}

#[test]
fn after_a_failed_sync_no_later_one_helps() {
    let lost = left(|disk, file| {
        file.append(&[2; 424]).unwrap();
        disk.schedule(disk.operations(), Event::Fail);
        file.sync().unwrap_err();
        file.sync().unwrap();
        let mut read = Vec::new();
        disk.at("/file").open().unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, [[1; 600].as_slice(), &[2; 424]].concat(), "reads see it");
    });
    assert!(lost.iter().flatten().any(|bytes| bytes.len() == 1024 && bytes[600..] == [0; 424]), "{lost:?}");
}

#[test]
fn a_lying_drive_loses_what_it_says_it_has() {
    let left = |seed| {
        let disk = Simulated::new(seed);
        disk.ignore_syncs_of("state.partial");
        disk.at("/state").replace(Access::Owner, |file| file.write_all(b"all")).unwrap();
        disk.lose_power();
        disk.at("/state").read().unwrap()
    };
    assert!((0..20).any(|seed| left(seed) != b"all"));
}

#[test]
fn every_kind_of_failure_is_an_error_once() {
    for seed in 0..20 {
        let disk = Simulated::new(seed);
        let place = disk.at("/file");
        let whole = |bytes: &'static [u8]| place.replace(Access::Owner, move |file| file.write_all(bytes));
        whole(b"old").unwrap();
        let before = disk.operations();
        whole(b"old").unwrap();
        let length = disk.operations() - before;
        assert!(length >= 7);
        for step in 0..length {
            for event in [Event::Fail, Event::Full(length), Event::Kill, Event::PowerLoss] {
                disk.schedule(disk.operations() + step, event);
                let replaced = whole(b"new").is_ok();
                assert_eq!(disk.is_stopped(), matches!(event, Event::Kill | Event::PowerLoss));
                disk.lose_power();
                let read = place.read().unwrap();
                assert!(read == b"new" || (read == b"old" && !replaced), "{event:?} at {step}");
                disk.state().full_until = 0;
                whole(b"old").unwrap();
            }
        }
    }
}

#[test]
fn a_lock_is_held_once_and_ends_with_its_process() {
    let disk = Simulated::new(0);
    let lock = disk.at("/lock").lock().unwrap();
    assert!(matches!(disk.at("/lock").lock().err(), Some(crate::Error::Locked { .. })));
    drop(lock);
    let lock = disk.at("/lock").lock().unwrap();
    disk.restart();
    let second = disk.at("/lock").lock().unwrap();
    drop(lock);
    assert!(disk.at("/lock").lock().is_err(), "the end of an old process frees nothing");
    drop(second);
    assert!(disk.at("/lock").lock().is_ok());
}
