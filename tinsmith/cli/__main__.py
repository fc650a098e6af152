from tinsmith.cli import main

raise SystemExit(main())
